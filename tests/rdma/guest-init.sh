#!/bin/busybox sh
# /init of a guest of tests/rdma/testbed: brings up modules, links and rxe devices, then runs /payload/run.sh
# and reports its exit status on the kernel console.
# Everything here runs as PID 1 inside a throw-away initramfs; nothing touches the host.

export PATH=/payload/bin:/bin:/sbin:/usr/bin:/usr/sbin
B=/bin/busybox
ip() { /usr/bin/ip "$@"; }   # busybox would take its own, smaller applets first
tc() { /usr/bin/tc "$@"; }
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs devtmpfs /dev
$B mkdir -p /dev/shm /dev/pts /tmp /run
$B mount -t tmpfs tmpfs /dev/shm
$B mount -t devpts devpts /dev/pts
$B mount -t tmpfs tmpfs /tmp

. /payload/config        # NODE_ID NODE_COUNT MTU SHARE LAN PROCS and the LINKS table, written by the host

say() { echo "TESTBED $NODE_ID t=$($B cut -d' ' -f1 /proc/uptime) $*" >/dev/console; }

finish() {               # $1 = exit status; the host greps this line
    $B sync
    say "RC=$1"
    $B sleep 0.05
    $B poweroff -f
}

say "userland up"

# Modules were ordered by the host (dependencies first); a missing one is an error worth seeing.
while read -r m; do
    [ -n "$m" ] && { $B insmod "/modules/$m" || say "insmod $m failed"; }
done </modules/order

ulimit -l unlimited      # memory registration pins pages
ip link set lo up

# ---- point-to-point links: one NIC + one rxe device each -------------------------------------------
# LINKS holds one line a link: "<link number> <peer id> <mac> <own ip> <peer ip>".
: >/tmp/links
echo "$LINKS" | while read -r n peer mac ip peerip; do
    [ -n "$n" ] || continue
    tries=0 dev=
    while [ -z "$dev" ] && [ $tries -lt 100 ]; do
        for d in /sys/class/net/*; do
            [ "$($B cat "$d/address" 2>/dev/null)" = "$mac" ] && dev=${d##*/}
        done
        [ -n "$dev" ] || { $B sleep 0.05; tries=$((tries + 1)); }
    done
    [ -n "$dev" ] || { say "no NIC with mac $mac"; continue; }
    ip link set dev "$dev" name "tb$n"
    ip link set dev "tb$n" mtu "$MTU"
    ip addr add "$ip/30" dev "tb$n"
    ip link set dev "tb$n" up
    rdma link add "rxe$n" type rxe netdev "tb$n" || say "rdma link add rxe$n failed"
    echo "$n tb$n rxe$n $peer $ip $peerip" >>/tmp/links
done

# ---- one-guest mode: every node is a process, every cable a veth pair with an rxe device at each end --
# PAIRS holds one line a cable: "<cable> <node a> <a's link number> <node b> <b's link number>".
# Both addresses of a cable are local here, so rules make locally sent packets take the wire all the same.
if [ "${PROCS:-0}" = 1 ]; then
    for f in all default; do echo 0 >/proc/sys/net/ipv4/conf/$f/rp_filter; echo 1 >/proc/sys/net/ipv4/conf/$f/accept_local; done
    ip rule add pref 10 iif lo lookup 100
    ip rule add pref 20 lookup local
    ip rule del pref 0
    echo "$PAIRS" | while read -r k a na b nb; do
        [ -n "$k" ] || continue
        A=n${a}tb$na B_=n${b}tb$nb; net=10.$((100 + k / 250)).$((k % 250))
        ip link add "$A" type veth peer name "$B_"
        ip addr add "$net.1/30" dev "$A"; ip addr add "$net.2/30" dev "$B_"
        ip link set "$A" mtu "$MTU" up; ip link set "$B_" mtu "$MTU" up
        ip route add "$net.2" dev "$A" src "$net.1" table 100
        ip route add "$net.1" dev "$B_" src "$net.2" table 100
        if [ -n "$NETEM" ]; then                       # e.g. "loss 1% delay 1ms": to test loss handling
            tc qdisc add dev "$A" root netem $NETEM; tc qdisc add dev "$B_" root netem $NETEM
        fi
        rdma link add "n${a}rxe$na" type rxe netdev "$A" || say "rdma link add on $A failed"
        rdma link add "n${b}rxe$nb" type rxe netdev "$B_" || say "rdma link add on $B_ failed"
        echo "$na $A n${a}rxe$na $b $net.1 $net.2" >>"/tmp/links.$a"
        echo "$nb $B_ n${b}rxe$nb $a $net.2 $net.1" >>"/tmp/links.$b"
    done
    i=0; while [ $i -lt "$NODE_COUNT" ]; do ip addr add "10.99.0.$((i + 1))/32" dev lo; i=$((i + 1)); done
fi

# ---- optional: a shared LAN (node 0 bridges one NIC per other node) ----------------------------------
if [ "${LAN:-0}" = 1 ] && [ "${PROCS:-0}" = 0 ]; then
    [ "$NODE_ID" = 0 ] && ip link add lan type bridge
    for d in /sys/class/net/*; do
        case "$($B cat "$d/address" 2>/dev/null)" in
        02:1a:*)
            if [ "$NODE_ID" = 0 ]; then
                ip link set dev "${d##*/}" master lan up
            else
                ip link set dev "${d##*/}" name lan
            fi ;;
        esac
    done
    ip addr add "10.99.0.$((NODE_ID + 1))/24" dev lan
    ip link set dev lan up
fi

# ---- optional: a host folder, read-write, at /share --------------------------------------------------
if [ "${SHARE:-0}" = 1 ]; then
    $B mkdir -p /share
    $B mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none share /share || say "9p mount failed"
fi

# /dev/infiniband is made by devtmpfs; older providers look for it after a short delay.
[ -e /dev/infiniband/uverbs0 ] || $B mkdir -p /dev/infiniband

say "ready"
export NODE_COUNT LD_LIBRARY_PATH=/payload/lib HOME=/tmp
$B stty -F /dev/ttyS1 raw -echo 2>/dev/null
if [ "${PROCS:-0}" = 0 ]; then
    export NODE_ID LINKS_FILE=/tmp/links
    $B setsid /bin/sh /payload/run.0.sh </dev/null >/dev/ttyS1 2>&1
    finish $?
fi
i=0 ncpu=$($B grep -c ^processor /proc/cpuinfo)
while [ $i -lt "$NODE_COUNT" ]; do                     # each line of output goes out as "@<node> <line>"
    pin=$((i % ncpu))                                  # a busy-polling node must not share a CPU by accident
    ( ( NODE_ID=$i LINKS_FILE=/tmp/links.$i $B taskset -c $pin $B setsid /bin/sh /payload/run.$i.sh </dev/null 2>&1
        echo $? >/tmp/rc.$i ) | while IFS= read -r l || [ -n "$l" ]; do printf '@%s %s\n' "$i" "$l"; done >/dev/ttyS1 ) &
    i=$((i + 1))
done
wait
i=0; worst=0
while [ $i -lt "$NODE_COUNT" ]; do
    rc=$($B cat /tmp/rc.$i 2>/dev/null || echo 255); say "node $i RC_NODE=$rc"; [ "$rc" = 0 ] || worst=$rc; i=$((i + 1))
done
finish $worst
