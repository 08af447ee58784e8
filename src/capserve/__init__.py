"""capserve: an OpenAI-compatible server for agents around one hot stateful hybrid model."""

__version__ = "0.1.0"
