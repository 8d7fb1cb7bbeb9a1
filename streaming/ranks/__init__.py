"""The ranks of one run: who starts them, how they talk, and how all end when one does. [no-torch]

Rank 0 is the process that the user started; the others, its *followers*, are reached over a *control channel*: a star
of TCP connections around rank 0 (`hub.py` there, `spoke.py` in a follower) that carries lines of JSON and no tensors.
"""
