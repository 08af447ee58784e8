"""How does one turn run on the engine?"""
