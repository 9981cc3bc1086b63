"""Who is asking, and how much is left?"""
