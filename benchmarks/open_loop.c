#define _GNU_SOURCE /* strcasestr */
/* The open loop of load.py in C: Poisson arrivals, each counted from the moment it was due.

   At ten times overload the generator sends tens of thousands of requests a second on the cores it shares with the server;
   in Python that takes more than half a core, which is then missing there. Here it is mostly the kernel's part.

   open_loop HOST PORT RATE SECONDS CONNECTIONS SEED REQUEST_FILE ...: every call draws one of the requests, so each has its
   part of the rate. One line per answer, "request status due_us sent_us took_us", all from the first arrival, with the number
   of its request; status 0: the server closed the connection. Then "end OFFERED UNANSWERED CPU_US". Lines are written when it
   is over. */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define TICK_NS 500000 /* as in load.py: many sends and answers at a time cost less than each by itself */
#define MOST_BYTES 65536 /* of a response */
#define SETTLE_S 0.5 /* for the server to accept all connections: opening hundreds at once is not what is measured */
#define DRAIN_S 5.0

typedef struct { char *bytes; size_t size; } Request;
typedef struct { int fd, request, busy; double due, sent; size_t have, left; char buffer[MOST_BYTES]; } Line;
typedef struct { int request, status; double due, sent, took; } Answer;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static uint64_t dice;
static double uniform(void) { /* xorshift64* */
    dice ^= dice >> 12; dice ^= dice << 25; dice ^= dice >> 27;
    return ((dice * 2685821657736338717ULL) >> 11) * 0x1p-53;
}
static double gap_s(double rate) { return -log1p(-uniform()) / rate; }

static void *room(void *old, size_t size) {
    void *made = realloc(old, size);
    if (!made) { perror("memory"); exit(1); }
    return made;
}

static Request read_request(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) { perror(path); exit(1); }
    fseek(file, 0, SEEK_END);
    Request found = {.size = ftell(file)};
    found.bytes = room(NULL, found.size);
    rewind(file);
    if (fread(found.bytes, 1, found.size, file) != found.size) { perror(path); exit(1); }
    fclose(file);
    return found;
}

static void dial(int poll, Line *line, const char *host, int port) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    if (fd < 0 || inet_pton(AF_INET, host, &to.sin_addr) != 1 || connect(fd, (struct sockaddr *)&to, sizeof to)) {
        perror("connect");
        exit(1);
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = line};
    epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
    line->fd = fd;
    line->have = line->left = 0;
}

/* What the socket takes of the request; the rest goes when it has room again. False: the connection is gone. */
static int send_more(int poll, Line *line, const Request *request) {
    size_t waited = line->left;
    while (line->left) {
        ssize_t went = send(line->fd, request->bytes + request->size - line->left, line->left, 0);
        if (went < 0 && errno != EAGAIN) return 0;
        if (went < 0) break;
        line->left -= went;
    }
    if (line->left || waited != request->size) { /* the first try of a request that fits never asks epoll */
        struct epoll_event event = {.events = line->left ? EPOLLIN | EPOLLOUT : EPOLLIN, .data.ptr = line};
        epoll_ctl(poll, EPOLL_CTL_MOD, line->fd, &event);
    }
    return 1;
}

/* Status of the answer in the buffer if it is whole, else 0. */
static int whole(Line *line) {
    line->buffer[line->have] = 0;
    char *end = strstr(line->buffer, "\r\n\r\n");
    char *length = end ? strcasestr(line->buffer, "content-length: ") : NULL;
    if (!length || length > end || line->have < (size_t)(end + 4 - line->buffer) + strtoul(length + 16, NULL, 10)) return 0;
    return atoi(line->buffer + 9);
}

int main(int argc, char **argv) {
    if (argc < 8) { fprintf(stderr, "HOST PORT RATE SECONDS CONNECTIONS SEED REQUEST_FILE ...\n"); return 2; }
    double rate = atof(argv[3]), seconds = atof(argv[4]);
    int port = atoi(argv[2]), count = atoi(argv[5]), kinds = argc - 7;
    dice = 88172645463325252ULL ^ (uint64_t)atoll(argv[6]) * 0x9E3779B97F4A7C15ULL;
    signal(SIGPIPE, SIG_IGN);
    Request *requests = calloc(kinds, sizeof *requests);
    for (int i = 0; i < kinds; i++) requests[i] = read_request(argv[7 + i]);

    int poll = epoll_create1(0), idle_count = 0;
    Line *lines = calloc(count, sizeof *lines);
    Line **idle = calloc(count, sizeof *idle);
    struct epoll_event *ready = calloc(count, sizeof *ready);
    for (int i = 0; i < count; i++) {
        dial(poll, &lines[i], argv[1], port);
        idle[idle_count++] = &lines[i];
    }
    size_t most = (size_t)(rate * seconds * 1.2) + 1000, due_count = 0, sent_count = 0, answer_count = 0;
    double *due_s = room(NULL, most * sizeof *due_s); /* of all calls, in order; those before sent_count have been sent */
    Answer *answers = room(NULL, most * sizeof *answers);
    double begin = now_s() + SETTLE_S, due = begin + gap_s(rate), end = begin + seconds;
    struct timespec tick = {0, TICK_NS};
    while (1) {
        nanosleep(&tick, NULL);
        int found = epoll_wait(poll, ready, count, 0);
        for (int i = 0; i < found; i++) {
            Line *line = ready[i].data.ptr;
            int status = 0, gone = ready[i].events & (EPOLLERR | EPOLLHUP);
            if (!gone && line->left) gone = !send_more(poll, line, &requests[line->request]);
            if (!gone && ready[i].events & EPOLLIN) {
                ssize_t got = recv(line->fd, line->buffer + line->have, MOST_BYTES - 1 - line->have, 0);
                if (got == 0 || (got < 0 && errno != EAGAIN)) gone = 1;
                if (got > 0) line->have += got;
                status = whole(line);
            }
            if (line->due && (status || gone)) {
                answers[answer_count++] = (Answer){line->request, status, line->due, line->sent, now_s()};
                line->due = 0;
                line->have = 0;
            }
            int was_idle = !line->busy;
            if (gone) {
                close(line->fd);
                dial(poll, line, argv[1], port);
            }
            if (was_idle || line->due || line->left) continue; /* answered before all of it was sent: the rest goes first */
            line->busy = 0;
            idle[idle_count++] = line;
        }
        double now = now_s();
        while (due <= now && due < end) {
            if (due_count == most) {
                most *= 2;
                due_s = room(due_s, most * sizeof *due_s);
                answers = room(answers, most * sizeof *answers);
            }
            due_s[due_count++] = due;
            due += gap_s(rate);
        }
        while (sent_count < due_count && idle_count) {
            Line *line = idle[--idle_count];
            line->request = kinds == 1 ? 0 : (int)(uniform() * kinds);
            line->due = due_s[sent_count++];
            line->busy = 1;
            line->sent = now_s();
            line->left = requests[line->request].size;
            send_more(poll, line, &requests[line->request]); /* a connection that is gone says so to epoll */
        }
        if (due >= end && ((answer_count == due_count) || now > end + DRAIN_S)) break;
    }
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    for (size_t i = 0; i < answer_count; i++) {
        Answer *one = &answers[i];
        printf("%d %d %.0f %.0f %.0f\n", one->request, one->status, (one->due - begin) * 1e6, (one->sent - begin) * 1e6,
               (one->took - one->due) * 1e6);
    }
    double cpu_us = (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e6 + used.ru_utime.tv_usec + used.ru_stime.tv_usec;
    printf("end %zu %zu %.0f\n", due_count, due_count - answer_count, cpu_us);
    return 0;
}
