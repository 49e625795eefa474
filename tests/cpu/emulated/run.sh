#!/bin/sh
# Runs a test binary of noria-cpu on an emulated CPU; see README.md.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: $0 CPU BINARY [ARGUMENT...]" >&2
    exit 2
fi
cpu=$1 binary=$2
shift 2

work=$(mktemp -d)
processes=
trap 'kill -KILL $processes 2> /dev/null || true; rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

# A system of one program: busybox, the binary, and the libraries that it names.
root=$work/root
mkdir -p "$root/bin" "$root/proc" "$root/dev" "$root/tmp" "$work/cd"
cp "$(command -v busybox)" "$root/bin/busybox"
cp "$binary" "$root/bin/tests"
ldd "$binary" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done
cat > "$root/init" <<END
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
${NORIA_CPU_ISA:+export NORIA_CPU_ISA=$NORIA_CPU_ISA}
/bin/tests $*
echo "exit status: \$?"
/bin/busybox sleep 1000000
END
chmod +x "$root/init"
(cd "$root" && find . | cpio --quiet -o -H newc) > "$work/cd/initrd"

# Debian's kernel, unless another is named.
if [ -z "${NORIA_EMULATED_KERNEL:-}" ]; then
    package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: //p' | head -n 1)
    (cd "$work" && apt-get download -qq "$package" && dpkg -x "$package"_*.deb kernel)
    NORIA_EMULATED_KERNEL=$(echo "$work"/kernel/boot/vmlinuz-*)
fi
cp "$NORIA_EMULATED_KERNEL" "$work/cd/kernel"

# A CD that boots it. The emulated clock goes by instructions, not by what the CPU says of itself; what else is turned off
# costs time, or Bochs.
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$work/cd"
cat > "$work/cd/isolinux.cfg" <<END
default tests
label tests
    kernel kernel
    append initrd=initrd console=ttyS0 loglevel=3 nokaslr mitigations=off lsm=capability nopcid no5lvl tsc_early_khz=20000
END
xorriso -as mkisofs -quiet -o "$work/cd.iso" -b isolinux.bin -c boot.cat \
    -no-emul-boot -boot-load-size 4 -boot-info-table "$work/cd" 2> "$work/xorriso"

# Debian's Bochs shows a screen and begins in its debugger; one that was built without both is faster.
bochs=${NORIA_BOCHS:-bochs} display=nogui debugger=
if "$bochs" --help 2>&1 | grep -q -e '-rc '; then
    echo continue > "$work/debugger"
    display=term debugger="-rc $work/debugger"
fi
cat > "$work/bochsrc" <<END
config_interface: textconfig
display_library: $display
cpu: model=$cpu, count=1, ips=20000000
memory: guest=512, host=512
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path=$work/cd.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/serial
clock: sync=none
log: $work/log
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
END
touch "$work/serial"
tail -f "$work/serial" &
processes=$!
# shellcheck disable=SC2086
TERM=vt100 "$bochs" -q $debugger -f "$work/bochsrc" > "$work/screen" 2>&1 < /dev/null &
processes="$processes $!"
while ! grep -q 'exit status' "$work/serial"; do
    kill -0 $! 2> /dev/null || { cat "$work/screen" "$work/log" >&2; exit 1; }
    sleep 1
done
sleep 1
grep -q 'exit status: 0' "$work/serial"
