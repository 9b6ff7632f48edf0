"""The file around a program: header, checksum, signature. Needs no torch."""
