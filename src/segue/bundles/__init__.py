"""What is in a skill? A zip of instructions and files, looked at before a byte of it is written anywhere."""
