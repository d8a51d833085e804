"""How msmon gets into the processes of a run: environment, ``sitecustomize``, patched constructors.

Standard library only; the rest of msmon is imported when a process constructs its first optimizer.
"""
