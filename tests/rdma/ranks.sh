#!/bin/sh
# Runs in both nodes of a guest of two with one cable and two processors: channels and sums beside bare round trips, for the
# ledger. What an emulated machine takes says nothing but how they compare.
read -r _ _ device _ here there <"$LINKS_FILE"
exec /payload/bin/ranks_rdma "$NODE_ID" "$device" "$here" "$there"
