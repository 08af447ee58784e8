"""Who runs next, and for how long?"""
