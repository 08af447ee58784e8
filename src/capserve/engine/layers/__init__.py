"""Building blocks that the models share."""
