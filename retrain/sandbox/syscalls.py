"""The seccomp filter of a sandbox: refuses the system calls that reach out of it, and allows all others."""

import struct

# Supported machines, with the kernel's number of each (AUDIT_ARCH_…)
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System calls that are refused with EPERM, with their numbers on ``MACHINES``: they reach into other processes or the
# kernel, or allocate memory that no limit counts
REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "shmget": (29, 194),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
CLONE, CLONE3, PRLIMIT, SOCKET = (56, 220), (435, 435), (302, 261), (41, 198)
FAMILIES = (1, 2, 10)  # allowed sockets: Unix, IPv4 and IPv6, which reach no network; others may reach the host
NEW_NAMESPACES = 0x7E020000  # flags of clone() that create a namespace
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97


def seccomp_program(machine: str) -> bytes:
    """Return the filter of system calls as classic BPF (seccomp(2)) for ``machine``, a key of ``MACHINES``."""
    column = list(MACHINES).index(machine)
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, errno, kill = 0x7FFF0000, 0x00050000, 0x80000000
    call_number, architecture, first_argument = 0, 4, 16  # offsets in struct seccomp_data
    code = [
        (load, 0, 0, architecture),
        (equal, 1, 0, MACHINES[machine]),
        (answer, 0, 0, kill),
        (load, 0, 0, call_number),
        (at_least, 0, 1, 0x40000000),  # the x32 interface, which has other numbers
        (answer, 0, 0, errno | ENOSYS),
        (equal, 0, 1, CLONE3[column]),  # a filter cannot read its flags; the C library falls back to clone
        (answer, 0, 0, errno | ENOSYS),
    ]
    for call in REFUSED.values():
        code += [(equal, 0, 1, call[column]), (answer, 0, 0, errno | EPERM)]
    code += [
        (equal, 0, 4, CLONE[column]),
        (load, 0, 0, first_argument),
        (any_bit, 0, 1, NEW_NAMESPACES),
        (answer, 0, 0, errno | EPERM),
        (answer, 0, 0, allow),
        (equal, 0, 4, PRLIMIT[column]),  # of another process, such as the one that enforces the limits
        (load, 0, 0, first_argument),
        (equal, 1, 0, 0),
        (answer, 0, 0, errno | EPERM),
        (answer, 0, 0, allow),
        (equal, 0, len(FAMILIES) + 2, SOCKET[column]),
        (load, 0, 0, first_argument),
        *((equal, len(FAMILIES) - place, 0, family) for place, family in enumerate(FAMILIES)),
        (answer, 0, 0, errno | EAFNOSUPPORT),
        (answer, 0, 0, allow),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
