#!/bin/sh
# Runs in each node of a guest of two with one cable: the first has the tests of verbs drive both ends of it.
[ "$NODE_ID" = 0 ] || exit 0
exec /payload/bin/verbs --test-threads 1 --nocapture over_the_systems_library native
