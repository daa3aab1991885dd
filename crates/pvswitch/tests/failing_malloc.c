// An allocator of which one call fails: preloaded, with a file FAILING_MALLOC that holds a process number and
// how many of its allocations are left until the one that fails; 0: none fails.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

extern void *__libc_malloc(size_t len);
extern void *__libc_calloc(size_t count, size_t len);
extern void *__libc_realloc(void *old, size_t len);
extern void *__libc_memalign(size_t align, size_t len);

struct state {
    _Atomic uint64_t pid;
    _Atomic uint64_t left;
};

static struct state *state;
// Not asked for at each allocation: threads may not be permitted to.
static uint64_t self;

static void forked(void) { self = (uint64_t)getpid(); }

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAILING_MALLOC");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    forked();
    pthread_atfork(NULL, NULL, forked);
    void *at = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED)
        state = at;
}

static int fails(void) {
    struct state *of = state;
    if (!of || atomic_load(&of->pid) != self)
        return 0;
    uint64_t left = atomic_load(&of->left);
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
