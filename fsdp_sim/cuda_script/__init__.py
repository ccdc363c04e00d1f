"""Cuda script: a program that says ``cuda`` and ``nccl`` runs on simulated ranks as it is."""
