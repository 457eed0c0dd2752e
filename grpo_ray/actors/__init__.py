"""The five actors of a run, one class per file; none of them imports Ray. clients.py has all calls between them."""
