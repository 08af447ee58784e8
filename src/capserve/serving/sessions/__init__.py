"""Which conversations are there, and what may be asked of them?"""
