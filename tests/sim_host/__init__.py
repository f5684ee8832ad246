"""A host in memory: systemd's model of one unit, cards, processes, files and an operator, below the product's own code.

Time is virtual. Every call of the product to the outside is a point at which its daemon can be killed. What would harm
somebody is noted when it happens, by what is true here, not by what the product believes.
"""
