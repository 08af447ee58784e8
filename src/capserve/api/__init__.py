"""The wire: HTTP, JSON and server-sent events. Decides nothing about state or schedule."""
