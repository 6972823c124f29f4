"""The addresses of both ends of the cable, as lines for `ip -batch`. Loopback aside, no side has another interface."""

import subprocess

# The host's own: each family has an address that looks private and one that looks public. Everything else is at the far
# end.
INSIDE = """\
link set lo up
link set world addrgenmode none
link set world up
address add 192.168.77.2/24 dev world
address add 93.184.77.2/32 dev world
address add 93.184.78.2/24 dev world
address add 93.184.78.3/24 dev world
address add fd77::2/64 dev world nodad
address add 2606:2800:77::2/128 dev world nodad
address add fe80::2/64 dev world nodad
route add default via 192.168.77.1
route add default via fe80::1 dev world
"""

# Every address there is, except those of the other end: whatever a connection aims at is reached, and noted, unless
# something stands between. One never answers. Link-local addresses have to be there by name, because the other end
# looks for them.
OUTSIDE = """\
link set lo up
link set world addrgenmode none
link set world up
address add 192.168.77.1/24 dev world
address add fe80::1/64 dev world nodad
address add fe80::5/64 dev world nodad
address add fe80::a9fe:a9fe/64 dev world nodad
route add 192.168.77.2/32 dev world table local
route add 93.184.77.2/32 dev world table local
route add 93.184.78.2/31 dev world table local
route add fd77::2/128 dev world table local
route add 2606:2800:77::2/128 dev world table local
route add fe80::2/128 dev world table local
route add local 0.0.0.0/0 dev lo table local
route add local ::/0 dev lo table local
route add blackhole 151.101.66.66/32 table local
"""


def lay(far_end):
    """Makes the cable, from here to the network namespace of a process."""
    ip(f"link add name world type veth peer name world netns {far_end}\n")


def ip(lines):
    subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)
