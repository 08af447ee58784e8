"""Which states are kept, where, and at what price?"""
