"""The program file: its structure, and how it is written."""
