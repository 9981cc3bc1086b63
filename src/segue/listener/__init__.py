"""How do bytes arrive and leave, whatever API they belong to?"""
