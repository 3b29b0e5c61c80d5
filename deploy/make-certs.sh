#!/bin/sh
# The certificates of a cluster, with the openssl program: a CA, and of it certificates for boostd, for each node's
# agent and for users. Each gets a directory to copy as a whole to where it is used, with three files: ca.crt, tls.crt
# and tls.key (0600). ca.key makes more of them and stays where it is, offline if you can.
#
# Never overwrites: a certificate that is to be made anew (it expires, another --san) has to be moved away first.
set -eu
umask 077

usage() {
    cat <<'TEXT'
usage: make-certs.sh DIR ca
       make-certs.sh DIR controller NAME [--san HOST]...   of boostd; HOST: names and numbers it is reached by
       make-certs.sh DIR node NAME                         of the agent of node NAME
       make-certs.sh DIR user NAME                         of a user, by the controller machine's name for them
       make-certs.sh DIR admin NAME                        likewise, and may do all
       make-certs.sh DIR revoke ROLE NAME                  takes back what was given; then a new one may be made
options: --days N  validity (ca 3650, others 825)

revoke writes DIR/trusted.crt, the CA with its list of revoked certificates: put it in the place of ca.crt (tls_ca) on
boostd's machine and send boostd SIGHUP.
Writes DIR/ca.crt, DIR/ca.key and DIR/ROLE-NAME/{ca.crt,tls.crt,tls.key}. Copy
  controller-NAME/  to /etc/boost/tls on boostd's machine
  node-NAME/        to /etc/boost/tls on the node, owner: who runs boost-agent
  user-NAME/        to ~/.config/boost of the user (admin-NAME/ likewise)
TEXT
}

fail() {
    echo "make-certs: $1" >&2
    [ -z "${2:-}" ] || echo "  hint: $2" >&2
    exit "${3:-1}"
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[ $# -ge 2 ] || { usage >&2; exit 2; }
dir=$1 role=$2
shift 2
name=
if [ "$role" != ca ]; then
    [ $# -ge 1 ] || fail "$role needs a name" "make-certs.sh --help" 2
    name=$1
    shift
fi
who=
if [ "$role" = revoke ]; then
    [ $# -ge 1 ] || fail "revoke needs a role and a name" "make-certs.sh --help" 2
    who=$1
    shift
fi
days= sans=
while [ $# -gt 0 ]; do
    case $1 in
    --days) [ $# -ge 2 ] || fail "--days needs a number" "" 2
        days=$2; shift 2 ;;
    --san) [ $# -ge 2 ] || fail "--san needs a host name or address" "" 2
        sans="$sans $2"; shift 2 ;;
    *) fail "unknown argument $1" "make-certs.sh --help" 2 ;;
    esac
done
case $days in *[!0-9]*) fail "--days $days is no number of days" "" 2 ;; esac
command -v openssl >/dev/null 2>&1 || fail "there is no openssl program" "apt-get install openssl"

check_name() {
    case $1 in '' | *[!A-Za-z0-9._-]*) fail "\"$1\" is not 1 to 64 bytes of [A-Za-z0-9._-]" "" 2 ;; esac
    [ ${#1} -le 64 ] || fail "\"$1\" has more than 64 bytes" "" 2
}

make_key() {
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null || fail "cannot write $1"
    chmod 600 "$1"
}

# Everything is made in a directory of its own and moved when it is whole.
work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT
run() {
    "$@" 2>"$work/log" || { cat "$work/log" >&2; fail "openssl failed (above); nothing was made"; }
}

if [ "$role" = ca ]; then
    [ -z "$sans" ] || fail "a CA has no --san" "" 2
    mkdir -p "$dir"
    for f in "$dir/ca.crt" "$dir/ca.key"; do
        [ ! -e "$f" ] || fail "$f is there already" "a new CA makes every certificate of the old one worthless; move it away first"
    done
    work=$(mktemp -d "$dir/.new.XXXXXX")
    make_key "$work/ca.key"
    run openssl req -x509 -new -key "$work/ca.key" -out "$work/ca.crt" -days "${days:-3650}" -sha256 \
        -subj "/O=BOOST/CN=BOOST CA $(openssl rand -hex 4)" -addext "basicConstraints=critical,CA:TRUE,pathlen:0" \
        -addext "keyUsage=critical,keyCertSign,cRLSign"
    chmod 644 "$work/ca.crt"
    mv "$work/ca.key" "$work/ca.crt" "$dir/"
    echo "made $dir/ca.crt and $dir/ca.key (keep the key where nobody else reads it)"
    exit 0
fi

[ -r "$dir/ca.key" ] && [ -r "$dir/ca.crt" ] || fail "there is no CA in $dir" "make-certs.sh $dir ca"

if [ "$role" = revoke ]; then
    given=$dir/$name-$who
    [ -r "$given/tls.crt" ] || fail "there is no $given/tls.crt" "revoke takes a role and a name that a certificate was made for"
    work=$(mktemp -d "$dir/.new.XXXXXX")
    [ -e "$dir/revoked.txt" ] || : >"$dir/revoked.txt"
    cat >"$work/conf" <<TEXT
[ca]
default_ca=it
[it]
database=$dir/revoked.txt
unique_subject=no
default_md=sha256
default_crl_days=3650
TEXT
    run openssl ca -config "$work/conf" -keyfile "$dir/ca.key" -cert "$dir/ca.crt" -revoke "$given/tls.crt"
    run openssl ca -config "$work/conf" -keyfile "$dir/ca.key" -cert "$dir/ca.crt" -gencrl -out "$work/crl"
    cat "$dir/ca.crt" "$work/crl" >"$work/trusted.crt"
    chmod 644 "$work/trusted.crt"
    mv "$work/trusted.crt" "$dir/trusted.crt"
    n=1
    while [ -e "$given.revoked$n" ]; do n=$((n + 1)); done
    mv "$given" "$given.revoked$n"
    rm -f "$dir/revoked.txt.old" "$dir/revoked.txt.attr.old"
    echo "revoked the certificate of $name $who; $dir/trusted.crt goes to boostd's machine in the place of ca.crt"
    exit 0
fi

case $role in
controller) use=serverAuth ;;
node | user | admin) use=clientAuth ;;
*) fail "\"$role\" is not ca, controller, node, user or admin" "make-certs.sh --help" 2 ;;
esac
check_name "$name"
[ -z "$sans" ] || [ "$role" = controller ] || fail "--san is for a controller: the others are told by their name" "" 2
out=$dir/$role-$name
[ ! -e "$out" ] || fail "$out is there already" "move it away first"

san="URI:boost://$role/$name"
if [ "$role" = controller ]; then
    [ -n "$sans" ] || sans=" $name localhost 127.0.0.1 ::1"
    for host in $sans; do
        case $host in
        *:* | [0-9]*.[0-9]*.[0-9]*.[0-9]*) san="$san,IP:$host" ;;
        *) check_name "$host"; san="$san,DNS:$host" ;;
        esac
    done
fi
work=$(mktemp -d "$dir/.new.XXXXXX")
make_key "$work/tls.key"
run openssl req -new -key "$work/tls.key" -out "$work/csr" -subj "/O=BOOST/OU=$role/CN=$name"
cat >"$work/ext" <<TEXT
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=$use
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
subjectAltName=$san
TEXT
run openssl x509 -req -in "$work/csr" -CA "$dir/ca.crt" -CAkey "$dir/ca.key" -set_serial "0x$(openssl rand -hex 15)" \
    -days "${days:-825}" -sha256 -extfile "$work/ext" -out "$work/tls.crt"
cp "$dir/ca.crt" "$work/ca.crt"
chmod 644 "$work/tls.crt" "$work/ca.crt"
rm -f "$work/csr" "$work/ext" "$work/log"
chmod 700 "$work"
mv -T "$work" "$out"
work=
echo "made $out/ (ca.crt, tls.crt, tls.key) for $san"
