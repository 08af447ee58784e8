"""What do agents send? Fourteen ways to talk to a server, and the account of what it read for them.

`material.py` has texts and tools, `client.py` the wire, `ledger.py` the ideal and the bound,
`server.py` a server that can be restarted, `pulse.py` the `/health` poller, `plays.py` the scenes.
"""
