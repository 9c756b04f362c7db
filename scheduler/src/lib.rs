//! Who leads and what runs where: consensus and placement of a Shoal swarm.
