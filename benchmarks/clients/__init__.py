"""Do agents that people run finish a task with tools against this server?

`python -m benchmarks.clients` installs four of them at the versions named in `agents`, serves the
embedded model, has each do a small task in a folder of its own, and looks at every request between
the two. Exit code 1 when one of them met a refused or failed request, used no tool, or did not end.
"""
