"""The room that answers: whose turn is it on this connection, and what may be forgotten?"""
