#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command beside an S3-compatible store: Ceph's radosgw with one monitor and one storage daemon that keeps all in memory, on
# loopback, in a temporary folder. Everything is gone afterwards.
#
#   ci/object_store.sh COMMAND [ARGUMENT...]
#
# The command finds the store, with an empty bucket, in TANDEM_TEST_S3_ENDPOINT, _BUCKET, _ACCESS_KEY, _SECRET_KEY, and in the
# variables that every S3 program reads. Ends with the command's status; 77 where Ceph is not installed (ci/setup.sh --all).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
(($# > 0)) || fail "say what to run beside the store"

for program in ceph-mon ceph-osd ceph radosgw radosgw-admin ceph-authtool monmaptool curl; do
  if ! command -v "$program" >/dev/null; then
    echo "$program is not installed: no object store to test against"
    exit "$skipped_status"
  fi
done

folder=$(mktemp -d)
daemons=()
is_ready=false
stop_all() {
  if [[ $is_ready == false ]]; then
    tail -n 20 "$folder/start.log" >&2
    echo "object_store.sh: the object store could not be started" >&2
  fi
  ((${#daemons[@]} == 0)) || kill "${daemons[@]}" 2>/dev/null || true
  wait
  rm -rf "$folder"
}
trap stop_all EXIT

is_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# Of the 200 ports from here on, Ceph takes what it needs.
port=$((20000 + RANDOM % 60 * 200))
while is_taken "$port" || is_taken $((port + 1)); do port=$((port + 200)); done

export AWS_ACCESS_KEY_ID=tandemtest AWS_SECRET_ACCESS_KEY=tandemsecret AWS_REGION=us-east-1
export AWS_ENDPOINT_URL=http://127.0.0.1:$port
export TANDEM_TEST_S3_ENDPOINT=$AWS_ENDPOINT_URL TANDEM_TEST_S3_BUCKET=tandem-test
export TANDEM_TEST_S3_ACCESS_KEY=$AWS_ACCESS_KEY_ID TANDEM_TEST_S3_SECRET_KEY=$AWS_SECRET_ACCESS_KEY

configuration=$folder/ceph.conf
keyring=$folder/keyring
monitor="[v2:127.0.0.1:$((port + 1)),v1:127.0.0.1:$((port + 2))]"
cluster=$(cat /proc/sys/kernel/random/uuid)
storage=$(cat /proc/sys/kernel/random/uuid)

write_configuration() {
  mkdir -p "$folder"/{mon,osd,rgw,run,log}
  cat >"$configuration" <<END
[global]
fsid = $cluster
mon initial members = a
mon host = $monitor
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
ms bind port min = $((port + 10))
ms bind port max = $((port + 190))
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 1073741824
mon allow pool size one = true
mon data avail warn = 1
mon data avail crit = 1
log file = $folder/log/\$name.log
admin socket = $folder/run/\$name.asok
run dir = $folder/run
pid file = $folder/run/\$name.pid
mon data = $folder/mon
osd data = $folder/osd
keyring = $keyring
[client.rgw.a]
rgw data = $folder/rgw
rgw frontends = beast endpoint=127.0.0.1:$port tcp_nodelay=1
rgw ops log rados = false
rgw thread pool size = 16
END
}

write_keys() {
  ceph-authtool -C "$keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *'
  ceph-authtool "$keyring" --gen-key -n mon. --cap mon 'allow *'
  ceph-authtool "$keyring" --gen-key -n client.rgw.a --cap mon 'allow rw' --cap osd 'allow rwx'
  ceph-authtool "$keyring" --gen-key -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *'
}

start() {
  local log=$folder/log/$1.out
  shift
  "$@" -c "$configuration" -f >"$log" 2>&1 &
  daemons+=($!)
}

start_store() {
  write_configuration
  write_keys
  monmaptool --create --clobber --fsid "$cluster" --addv a "$monitor" "$folder/monmap"
  ceph-mon -c "$configuration" --mkfs -i a --monmap "$folder/monmap" --keyring "$keyring"
  start mon ceph-mon -i a
  timeout 30 ceph -c "$configuration" osd new "$storage" 0
  ceph-osd -c "$configuration" -i 0 --mkfs --osd-uuid "$storage"
  start osd ceph-osd -i 0
  start rgw radosgw -n client.rgw.a
  timeout 60 radosgw-admin -c "$configuration" -n client.rgw.a user create --uid=test --display-name=test \
    --access-key="$AWS_ACCESS_KEY_ID" --secret-key="$AWS_SECRET_ACCESS_KEY"
  local attempt
  for ((attempt = 0; attempt < 300; ++attempt)); do
    if make_bucket; then return 0; fi
    sleep 0.2
  done
  echo "the store did not answer within a minute"
  return 1
}

# The header says that the body is empty: the hash of nothing.
make_bucket() {
  curl --header 'x-amz-content-sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855' --silent --show-error --fail --noproxy '*' --request PUT --user "$AWS_ACCESS_KEY_ID:$AWS_SECRET_ACCESS_KEY" \
    --aws-sigv4 "aws:amz:$AWS_REGION:s3" "$AWS_ENDPOINT_URL/$TANDEM_TEST_S3_BUCKET"
}

start_store >"$folder/start.log" 2>&1
is_ready=true
echo "object store ready after $SECONDS s: $AWS_ENDPOINT_URL"

"$@"
