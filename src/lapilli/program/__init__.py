"""The program file: its structure, and its writer."""
