"""The machine is found by what the system says when the command runs."""

import pytest

from noria.bench.machine import cpu_quota, detect_machine, memory_limit, parse_cpuinfo

X86 = """processor : 0
model name : Some CPU @ 2.0GHz
flags : fpu sse4_2 avx2 fma avx512f avx512_bf16 amx_bf16

processor : 1
model name : Other
flags : fpu
"""
ARM = "processor : 0\nFeatures : fp asimd asimddp i8mm bf16 sve\nCPU implementer : 0x41\nCPU part : 0xd40\n"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_flags_come_in_a_fixed_order_and_without_those_that_do_not_matter():
    model, flags = parse_cpuinfo(X86)
    assert model == "Some CPU @ 2.0GHz"
    assert flags == ("sse4_2", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")


def test_an_arm_cpu_is_named_by_its_part():
    model, flags = parse_cpuinfo(ARM)
    assert "0xd40" in model
    assert flags == ("asimd", "asimddp", "i8mm", "bf16", "sve")


def test_the_tightest_quota_above_the_process_counts(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
            "sys/fs/cgroup/outer/memory.max": "1073741824\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        },
    )
    assert cpu_quota(tmp_path) == 1.5
    assert memory_limit(tmp_path) == 2**30


def test_version_1_groups_are_read_by_controller(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "4096\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert cpu_quota(tmp_path) == 0.5
    assert memory_limit(tmp_path) == 4096


@pytest.mark.parametrize("text", ["-1\n", "max\n", ""])
def test_no_quota_is_no_limit(tmp_path, text):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "1:cpu:/\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": text,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(tmp_path) is None
    assert memory_limit(tmp_path) is None


def test_a_machine_is_detected_where_the_files_say_so(tmp_path):
    write(
        tmp_path,
        {
            "proc/cpuinfo": X86,
            "proc/meminfo": "MemTotal: 2048 kB\nMemFree: 10 kB\nMemAvailable: 1024 kB\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/memory.max": "1048576\n",
        },
    )
    machine = detect_machine(tmp_path)
    assert machine.num_usable_cpus == 0.5
    assert "quota" in machine.usable_cpus_reason
    assert machine.memory_bytes == 2048 * 1024
    assert machine.memory_available_bytes == 1024 * 1024
    assert machine.memory_limit_bytes == 1048576


def test_this_machine_has_cores_and_a_name():
    machine = detect_machine()
    assert machine.num_usable_cpus > 0
    assert machine.cpu_model
