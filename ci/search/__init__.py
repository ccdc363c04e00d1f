"""Search: generated programs, run by a limit of time or number, on any number of workers.

__main__.py   the command: batches over workers, a progress bar, a summary
batch.py      one batch: programs drawn from its number, run with every check, shrunk where one fails
coverage.py   what the programs of a search had in them, and what never came up
overlap.py    whether a run overlapped its collectives with compute
planted.py    the command that plants bugs: after how many programs each is found, how small it gets
plants.py     the bugs
unseen.py     bugs of someone who has not seen how programs are drawn
"""
