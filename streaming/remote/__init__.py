"""Models that lie on a server: headers and weights are read as byte ranges, and no local copy is made. [no-torch]"""
