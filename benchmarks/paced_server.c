/*
 * An OpenAI-compatible server that streams tokens on an exact schedule and writes down when it really sent each one.
 *
 *     gcc -O2 -Wall -Wextra -o paced_server paced_server.c
 *     ./paced_server --ttft-ms 200 --itl-ms 20 --log truth.csv
 *
 * It prints the port it listens on, and serves POST /v1/chat/completions and /v1/completions, always as a stream of
 * `max_tokens` tokens (64 without), one token to a frame and one frame to a send(). Token i is due `ttft + i * itl`
 * after the request was read, whatever happened to the tokens before it.
 *
 * Log, one line per finished request, written at SIGTERM or SIGINT at the latest:
 *     body_hash,t_received_ns,t_sent_ns|t_sent_ns|...
 * body_hash is the 64-bit FNV-1a hash of the request body, by which a client finds its own requests again; times are
 * CLOCK_MONOTONIC, taken just before send().
 *
 * One thread, epoll, and a binary heap of due times: at 64 streams of 50 tokens/s it is idle nearly all the time.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_MS 1000000LL
#define NS_PER_SECOND 1000000000LL
#define EVENTS_PER_WAIT 256

struct connection {
    int fd;
    bool closed;

    char *input; /* bytes of requests not yet answered; always ends with a NUL that is not counted */
    size_t input_length, input_capacity;

    bool streaming; /* a request is being answered; the fields below are about it */
    bool chat;
    int sent, wanted; /* tokens */
    uint64_t body_hash;
    int64_t received_ns, due_ns;
    int64_t *sent_ns;
    int heap_index; /* where it is in the heap of due times, -1 when it is not */
};

static int64_t ttft_ns = 200 * NS_PER_MS, itl_ns = 20 * NS_PER_MS;
static int epoll_fd;
static FILE *log_file;
static volatile sig_atomic_t stopping;

static struct connection **heap;
static int heap_length, heap_capacity;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * NS_PER_SECOND + now.tv_nsec;
}

static void *grow(void *memory, size_t bytes)
{
    memory = realloc(memory, bytes);
    if (memory == NULL) {
        perror("paced_server");
        exit(1);
    }
    return memory;
}

/* ---- the heap of connections that owe a token, earliest first */

static void heap_put(int index, struct connection *connection)
{
    heap[index] = connection;
    connection->heap_index = index;
}

static void heap_rise(int index)
{
    struct connection *moving = heap[index];
    while (index > 0 && heap[(index - 1) / 2]->due_ns > moving->due_ns) {
        heap_put(index, heap[(index - 1) / 2]);
        index = (index - 1) / 2;
    }
    heap_put(index, moving);
}

static void heap_sink(int index)
{
    struct connection *moving = heap[index];
    for (;;) {
        int child = 2 * index + 1;
        if (child + 1 < heap_length && heap[child + 1]->due_ns < heap[child]->due_ns)
            child++;
        if (child >= heap_length || heap[child]->due_ns >= moving->due_ns)
            break;
        heap_put(index, heap[child]);
        index = child;
    }
    heap_put(index, moving);
}

static void heap_add(struct connection *connection)
{
    if (heap_length == heap_capacity) {
        heap_capacity = heap_capacity ? 2 * heap_capacity : 256;
        heap = grow(heap, heap_capacity * sizeof *heap);
    }
    heap_put(heap_length++, connection);
    heap_rise(heap_length - 1);
}

static void heap_remove(struct connection *connection)
{
    int index = connection->heap_index;
    if (index < 0)
        return;
    connection->heap_index = -1;
    struct connection *last = heap[--heap_length];
    if (last == connection)
        return;
    heap_put(index, last);
    heap_rise(index);
    heap_sink(last->heap_index);
}

/* ---- answers */

static void hang_up(struct connection *connection)
{
    heap_remove(connection);
    close(connection->fd); /* epoll forgets a closed descriptor */
    connection->closed = true;
}

/* A frame is far smaller than a socket buffer: a client too slow to take it is not worth measuring. */
static void send_all(struct connection *connection, const char *data, size_t length)
{
    if (!connection->closed && send(connection->fd, data, length, MSG_NOSIGNAL) != (ssize_t)length)
        hang_up(connection);
}

/* Append one server-sent event, framed as one HTTP chunk. */
static int put_event(char *out, const char *json)
{
    return sprintf(out, "%zx\r\ndata: %s\n\n\r\n", strlen(json) + 8, json);
}

static int put_choice(char *out, bool chat, const char *text, const char *finish_reason)
{
    char json[512];
    if (chat)
        sprintf(json,
                "{\"object\":\"chat.completion.chunk\",\"model\":\"paced\",\"choices\":[{\"index\":0,"
                "\"delta\":{\"content\":\"%s\"},\"finish_reason\":%s}]}",
                text, finish_reason);
    else
        sprintf(json,
                "{\"object\":\"text_completion\",\"model\":\"paced\",\"choices\":[{\"index\":0,"
                "\"text\":\"%s\",\"finish_reason\":%s}]}",
                text, finish_reason);
    return put_event(out, json);
}

static void log_request(const struct connection *connection)
{
    if (log_file == NULL)
        return;
    fprintf(log_file, "%016" PRIx64 ",%" PRId64 ",", connection->body_hash, connection->received_ns);
    for (int token = 0; token < connection->sent; token++)
        fprintf(log_file, token ? "|%" PRId64 : "%" PRId64, connection->sent_ns[token]);
    fputc('\n', log_file);
}

static void begin_stream(struct connection *connection)
{
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    connection->streaming = true;
    connection->sent = 0;
    connection->due_ns = connection->received_ns + ttft_ns;
    connection->sent_ns = grow(connection->sent_ns, connection->wanted * sizeof *connection->sent_ns);
    send_all(connection, head, sizeof head - 1);
    if (!connection->closed)
        heap_add(connection);
}

static void end_stream(struct connection *connection)
{
    char out[2048], json[256];
    int length = put_choice(out, connection->chat, "", "\"length\"");
    sprintf(json, "{\"choices\":[],\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":%d,\"total_tokens\":%d}}",
            connection->sent, connection->sent + 16);
    length += put_event(out + length, json);
    length += put_event(out + length, "[DONE]");
    length += sprintf(out + length, "0\r\n\r\n");
    log_request(connection);
    connection->streaming = false;
    send_all(connection, out, length);
}

static void send_token(struct connection *connection)
{
    char out[1024];
    int length = put_choice(out, connection->chat, " tok", "null");
    heap_remove(connection);
    connection->sent_ns[connection->sent++] = now_ns();
    send_all(connection, out, length);
    if (connection->closed)
        return;
    if (connection->sent == connection->wanted) {
        end_stream(connection);
        return;
    }
    connection->due_ns = connection->received_ns + ttft_ns + connection->sent * itl_ns;
    heap_add(connection);
}

/* ---- requests */

static uint64_t hash_of(const char *data, size_t length)
{
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t index = 0; index < length; index++)
        hash = (hash ^ (unsigned char)data[index]) * 0x100000001b3;
    return hash;
}

static long number_after(const char *text, const char *key, long otherwise)
{
    const char *found = strcasestr(text, key);
    return found ? strtol(found + strlen(key), NULL, 10) : otherwise;
}

/* Answer the requests that are complete, one after another; stop at one that starts a stream. */
static void take_requests(struct connection *connection)
{
    while (!connection->closed && !connection->streaming) {
        char *end = memmem(connection->input, connection->input_length, "\r\n\r\n", 4);
        if (end == NULL)
            return;
        char *body = end + 4;
        *end = 0;
        size_t body_length = number_after(connection->input, "\r\ncontent-length:", 0);
        size_t total = body - connection->input + body_length;
        if (connection->input_length < total) {
            *end = '\r';
            return;
        }
        if (strncmp(connection->input, "POST /v1/", 9) == 0) {
            char kept = body[body_length];
            body[body_length] = 0;
            connection->received_ns = now_ns();
            connection->body_hash = hash_of(body, body_length);
            connection->chat = strncmp(connection->input + 9, "chat/", 5) == 0;
            connection->wanted = number_after(body, "\"max_tokens\": ", 64);
            if (connection->wanted < 1 || connection->wanted > 100000)
                connection->wanted = 64;
            body[body_length] = kept;
            begin_stream(connection);
        } else {
            static const char models[] = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 41\r\n\r\n"
                                         "{\"object\":\"list\",\"data\":[{\"id\":\"paced\"}]}";
            send_all(connection, models, sizeof models - 1);
        }
        connection->input_length -= total;
        memmove(connection->input, connection->input + total, connection->input_length + 1);
    }
}

static void take_input(struct connection *connection)
{
    for (;;) {
        if (connection->input_capacity - connection->input_length < 65536) {
            connection->input_capacity = connection->input_length + 131072;
            connection->input = grow(connection->input, connection->input_capacity);
        }
        size_t room = connection->input_capacity - connection->input_length - 1;
        ssize_t count = recv(connection->fd, connection->input + connection->input_length, room, 0);
        if (count < 0 && errno == EAGAIN)
            break;
        if (count <= 0) {
            hang_up(connection);
            return;
        }
        connection->input_length += count;
        connection->input[connection->input_length] = 0;
    }
    if (connection->input != NULL)
        take_requests(connection);
}

static void accept_all(int listener)
{
    int fd, yes = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct connection *connection = calloc(1, sizeof *connection);
        if (connection == NULL)
            exit(1);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        connection->fd = fd;
        connection->heap_index = -1;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static void discard(struct connection *connection)
{
    free(connection->input);
    free(connection->sent_ns);
    free(connection);
}

/* ---- the program */

static void stop(int number)
{
    (void)number;
    stopping = 1;
}

static int listen_on(int port)
{
    int yes = 1;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4096)) {
        perror("paced_server: listen");
        exit(1);
    }
    getsockname(listener, (struct sockaddr *)&address, &length);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return listener;
}

static void serve(int listener)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL}, events[EVENTS_PER_WAIT];
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &event);
    while (!stopping) {
        struct timespec timeout = {.tv_sec = 3600};
        if (heap_length) {
            int64_t left = heap[0]->due_ns - now_ns();
            left = left > 0 ? left : 0;
            timeout = (struct timespec){.tv_sec = left / NS_PER_SECOND, .tv_nsec = left % NS_PER_SECOND};
        }
        int count = epoll_pwait2(epoll_fd, events, EVENTS_PER_WAIT, &timeout, NULL);
        for (int index = 0; index < count; index++) {
            struct connection *connection = events[index].data.ptr;
            if (connection == NULL) {
                accept_all(listener);
                continue;
            }
            take_input(connection);
            if (connection->closed)
                discard(connection);
        }
        int64_t now = now_ns();
        while (heap_length && heap[0]->due_ns <= now) {
            struct connection *connection = heap[0];
            send_token(connection);
            if (!connection->closed && !connection->streaming)
                take_requests(connection);
            if (connection->closed)
                discard(connection);
        }
    }
}

int main(int count, char **arguments)
{
    int port = 0;
    for (int index = 1; index + 1 < count; index += 2) {
        const char *name = arguments[index], *value = arguments[index + 1];
        if (strcmp(name, "--port") == 0)
            port = atoi(value);
        else if (strcmp(name, "--ttft-ms") == 0)
            ttft_ns = (int64_t)(atof(value) * NS_PER_MS);
        else if (strcmp(name, "--itl-ms") == 0)
            itl_ns = (int64_t)(atof(value) * NS_PER_MS);
        else if (strcmp(name, "--log") == 0)
            log_file = fopen(value, "w");
        else {
            fprintf(stderr, "paced_server: unknown option %s\n", name);
            return 2;
        }
    }
    prctl(PR_SET_TIMERSLACK, 1);
    struct sigaction action = {.sa_handler = stop};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    serve(listen_on(port));
    if (log_file != NULL)
        fclose(log_file);
    return 0;
}
