"""How is the port guarded: TLS, limits of HTTP connections, open files?"""
