"""The room that answers: who produces tokens?"""
