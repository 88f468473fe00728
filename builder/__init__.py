"""Bestiary's builder: facts of a family, the pages made from them, and the command line."""
