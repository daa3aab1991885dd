// An allocator of which one call fails: preloaded, with a file FAILING_MALLOC that holds `struct state`.
// A call path is the return addresses from the allocation up to the start of its thread, each relative to the
// file that it is in: the same in every process of a program.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include <unwind.h>

extern void *__libc_malloc(size_t len);
extern void *__libc_calloc(size_t count, size_t len);
extern void *__libc_realloc(void *old, size_t len);
extern void *__libc_memalign(size_t align, size_t len);

enum { PATHS = 1 << 16, FILES = 16, DEPTH = 256 };

// `left`: the first allocation on a path of which none has failed.
#define NEW_PATH UINT64_MAX
// `pid`: the next process that starts.
#define NEXT UINT64_MAX

struct state {
    // The process whose allocations count; 0: none.
    _Atomic uint64_t pid;
    // How many are left until the one that fails; 0: none fails.
    _Atomic uint64_t left;
    // The paths on which one has failed, by hash.
    _Atomic uint64_t failed[PATHS];
};

static struct state *state;
// Not asked for at each allocation: threads may not be permitted to.
static uint64_t self;

// The files of the process: where each is mapped.
static struct file {
    uintptr_t start, end;
} files[FILES];

static void forked(void) { self = (uint64_t)getpid(); }

static int add_file(struct dl_phdr_info *info, size_t size, void *count) {
    size_t *n = count;
    struct file file = {UINTPTR_MAX, 0};
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + part->p_vaddr;
        if (part->p_type != PT_LOAD)
            continue;
        if (start < file.start)
            file.start = start;
        if (start + part->p_memsz > file.end)
            file.end = start + part->p_memsz;
    }
    if (*n == FILES)
        abort();
    files[(*n)++] = file;
    return (void)size, 0;
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAILING_MALLOC");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    forked();
    pthread_atfork(NULL, NULL, forked);
    size_t count = 0;
    dl_iterate_phdr(add_file, &count);
    void *at = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return;
    state = at;
    uint64_t next = NEXT;
    atomic_compare_exchange_strong(&state->pid, &next, self);
}

struct path {
    uint64_t hash;
    unsigned depth;
};

static _Unwind_Reason_Code add_caller(struct _Unwind_Context *context, void *of) {
    struct path *path = of;
    uintptr_t ip = _Unwind_GetIP(context);
    uint64_t word = 0;
    for (size_t i = 0; i < FILES; i++)
        if (files[i].start <= ip && ip < files[i].end)
            word = (uint64_t)i << 48 | (ip - files[i].start);
    path->hash = (path->hash ^ word) * 0x9e3779b97f4a7c15;
    path->hash ^= path->hash >> 32;
    return ++path->depth < DEPTH ? _URC_NO_REASON : _URC_END_OF_STACK;
}

// Where the hash of the caller's path is, or is to be, among those that failed.
static _Atomic uint64_t *place(struct state *of, uint64_t *hash) {
    struct path path = {1, 0};
    _Unwind_Backtrace(add_caller, &path);
    *hash = path.hash ? path.hash : 1;
    for (size_t n = 0, at = *hash % PATHS; n < PATHS; n++, at = (at + 1) % PATHS) {
        uint64_t has = atomic_load(&of->failed[at]);
        if (!has || has == *hash)
            return &of->failed[at];
    }
    abort();
}

static int is_new_path(struct state *of) {
    // The unwinder may allocate.
    static __thread int unwinds __attribute__((tls_model("initial-exec")));
    if (unwinds)
        return 0;
    uint64_t hash, left = NEW_PATH;
    unwinds = 1;
    _Atomic uint64_t *at = place(of, &hash);
    unwinds = 0;
    // Of several threads one fails.
    if (atomic_load(at) || !atomic_compare_exchange_strong(&of->left, &left, 0))
        return 0;
    atomic_store(at, hash);
    return 1;
}

static int fails(void) {
    struct state *of = state;
    if (!of || atomic_load(&of->pid) != self)
        return 0;
    uint64_t left = atomic_load(&of->left);
    if (left == NEW_PATH)
        left = (uint64_t)is_new_path(of);
    else
        while (left && !atomic_compare_exchange_weak(&of->left, &left, left - 1))
            ;
    if (left == 1)
        errno = ENOMEM;
    return left == 1;
}

void *malloc(size_t len) { return fails() ? NULL : __libc_malloc(len); }

void *calloc(size_t count, size_t len) { return fails() ? NULL : __libc_calloc(count, len); }

void *realloc(void *old, size_t len) { return fails() ? NULL : __libc_realloc(old, len); }

void *aligned_alloc(size_t align, size_t len) { return fails() ? NULL : __libc_memalign(align, len); }

int posix_memalign(void **at, size_t align, size_t len) {
    void *made = fails() ? NULL : __libc_memalign(align, len);
    if (!made)
        return ENOMEM;
    *at = made;
    return 0;
}
