"""Mutation of synchronisation: break one site of a package at a time; each break must be found.

    site.py        what a site is, and what breaking it does
    subject.py     which package, which of its files are seams that sites look through
    probe.py       calls of the verbs are seen, attributed to their site, and broken there
    programs.py    what is run: programs as data, and rank functions
    scan.py        calls in the source that no program makes
    core_programs.py  core_functions.py     programs for fsdp_core
    change.py  core_changes.py     known bugs of such runtimes, put into fsdp_core
    fsdp2.py       programs for PyTorch's FSDP2
    trial.py       one program, run with some sites broken: is there a finding that was not there before
    graph.py       happens-before of a recorded run as paths of edges
    proof.py       why a survivor survives: the paths that order the same pairs without it
    campaign.py    all sites, then pairs of survivors
    table.py       results as a table and as JSON

Nothing is edited on disk: a broken call is one that does nothing while a program runs.
"""
