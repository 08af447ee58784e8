"""How a model like nano is made: generated conversations in, a loadable checkpoint out."""
