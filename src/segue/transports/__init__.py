"""How do bytes arrive and leave?"""
