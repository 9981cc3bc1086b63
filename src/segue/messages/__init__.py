"""How do clients of the Messages API ask for turns, and how do they read them?"""
