"""How does a turn run Python code?"""
