"""How does what must outlive the process lie on disk?"""
