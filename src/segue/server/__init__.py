"""Who is wired to whom?"""
