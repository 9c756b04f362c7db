#!/bin/sh
# Runs in a guest: says "0 0", then carries out, one after the other, what the host says on the control line ("NUMBER COMMAND"),
# leaves the output at /share/NODE.NUMBER and answers "NUMBER STATUS". `exit` ends the guest.
stty -F /dev/ttyS2 raw -echo
exec 3<>/dev/ttyS2
echo "0 0" >&3
while IFS= read -r line <&3; do
    number=${line%% *} command=${line#* }
    [ "$command" = exit ] && exit 0
    (eval "$command") </dev/null >"/share/$NODE_ID.$number" 2>&1 3>&-
    echo "$number $?" >&3
done
