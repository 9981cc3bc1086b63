"""The room that answers: what is remembered?"""
