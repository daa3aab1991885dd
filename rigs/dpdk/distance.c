// How far two CPUs are from each other: the round trip of one cache line between them, in ns.
// On a shared machine the answer changes within minutes, and every figure of a two-core ring with
// it, so each measurement is bracketed by this probe.
//
// usage: distance CPU_A CPU_B
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 20000, SAMPLES = 9 };

static _Alignas(128) atomic_int ball;

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (pthread_setaffinity_np(pthread_self(), sizeof set, &set)) {
        fprintf(stderr, "distance: cannot run on CPU %d\n", cpu);
        exit(1);
    }
}

static void *answer(void *cpu) {
    pin(*(int *)cpu);
    for (int n = 0; n < ROUNDS * SAMPLES; n++) {
        while (atomic_load_explicit(&ball, memory_order_acquire) != 2 * n + 1) {}
        atomic_store_explicit(&ball, 2 * n + 2, memory_order_release);
    }
    return NULL;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: distance CPU_A CPU_B\n");
        return 2;
    }
    int here = atoi(argv[1]), there = atoi(argv[2]);
    double ns[SAMPLES];
    pthread_t other;
    pin(here);
    pthread_create(&other, NULL, answer, &there);
    for (int s = 0; s < SAMPLES; s++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int n = s * ROUNDS; n < (s + 1) * ROUNDS; n++) {
            atomic_store_explicit(&ball, 2 * n + 1, memory_order_release);
            while (atomic_load_explicit(&ball, memory_order_acquire) != 2 * n + 2) {}
        }
        clock_gettime(CLOCK_MONOTONIC, &b);
        ns[s] = ((b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec)) / ROUNDS;
    }
    pthread_join(other, NULL);
    // The median: one time slice given to another program must not look like distance.
    qsort(ns, SAMPLES, sizeof ns[0], ascending);
    printf("%.0f\n", ns[SAMPLES / 2]);
    return 0;
}
