"""How does what a store holds get out of it: into a copy, into another database, or away for good?"""
