"""The cluster on a Ray cluster: an actor that supervises each member, and the controller of all.

Ray is an extra, and is imported only below this folder and only once it is asked for.
"""
