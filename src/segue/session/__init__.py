"""Which request runs next on a connection, and what may be forgotten?"""
