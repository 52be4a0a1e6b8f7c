/* Faults of the machine, told by a shared page: what the wall clock is off by, and what becomes of a sync to disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct faults { int64_t wall_s; int32_t sync_fails; int32_t sync_hangs; };
static volatile struct faults *faults;

__attribute__((constructor)) static void look(void) {
    const char *path = getenv("LAMINA_TEST_FAULTS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(0, sizeof(struct faults), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) faults = page;
    close(file);
}

static int synced(int file, int (*real)(int)) {
    while (faults && faults->sync_hangs) usleep(1000);
    if (faults && faults->sync_fails) { errno = EIO; return -1; }
    return real(file);
}
int fsync(int file) { static int (*real)(int); if (!real) real = dlsym(RTLD_NEXT, "fsync"); return synced(file, real); }
int fdatasync(int file) { static int (*real)(int); if (!real) real = dlsym(RTLD_NEXT, "fdatasync"); return synced(file, real); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int found = real(clock, now);
    if (faults && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += faults->wall_s;
    return found;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int found = real(now, zone);
    if (faults) now->tv_sec += faults->wall_s;
    return found;
}
time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
