// A Bigtable server in memory, for tests: Google's bttest, as Debian packages it, on an address that it prints.
//
// A call with the metadata "perco-fault: before" loses its request, one with "after" its answer. Every call is one
// atomic step, as the service promises for one row.
//
// With -lose N one call in N loses its request, one its answer; one mutation is told as lost, and is carried out up to
// -late later; and one in ten times as many hangs until its deadline, and a mutation is then carried out up to -late
// later. At the end of its standard input it prints how many of each, and ends.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"cloud.google.com/go/bigtable/bttest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	messageBytesMax = 256 << 20
	hangs           = 10 // calls are lost ten times as often: a process that opens the store gives up when one hangs
)

var (
	steps sync.Mutex
	lost  = status.Error(codes.Unavailable, "lost on the way")

	lose = flag.Int("lose", 0, "one call in so many is lost, in each of the ways; 0: none")
	late = flag.Duration("late", 4*time.Second, "a mutation that is told as lost is carried out within so long")
	seed = flag.Int64("seed", 1, "of the faults")

	dice                           sync.Mutex
	random                         *rand.Rand
	requests, answers, later, hung atomic.Int64
)

func faultOf(ctx context.Context, method string) string {
	found, _ := metadata.FromIncomingContext(ctx)
	for _, value := range found.Get("perco-fault") {
		return value
	}
	if *lose == 0 || !strings.HasPrefix(method, "/google.bigtable.v2.Bigtable/") {
		return ""
	}
	dice.Lock()
	fallen := random.Intn(*lose)
	if fallen == 3 && random.Intn(hangs) > 0 {
		fallen = -1
	}
	dice.Unlock()
	switch fallen {
	case 0:
		requests.Add(1)
		return "before"
	case 1:
		answers.Add(1)
		return "after"
	case 2:
		return "late"
	case 3:
		hung.Add(1)
		return "hang"
	}
	return ""
}

// carryOutLater makes a call whose caller was told that it is lost.
func carryOutLater(request interface{}, handle grpc.UnaryHandler) {
	dice.Lock()
	pause := time.Duration(random.Int63n(int64(*late)))
	dice.Unlock()
	time.Sleep(pause)
	steps.Lock()
	defer steps.Unlock()
	if _, err := handle(context.Background(), request); err == nil {
		later.Add(1)
	}
}

func one(ctx context.Context, request interface{}, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (interface{}, error) {
	fault := faultOf(ctx, info.FullMethod)
	switch fault {
	case "before":
		return nil, lost
	case "hang":
		<-ctx.Done()
		go carryOutLater(request, handle)
		return nil, lost
	case "late":
		go carryOutLater(request, handle)
		return nil, lost
	}
	steps.Lock()
	response, err := handle(ctx, request)
	steps.Unlock()
	if fault == "after" {
		return nil, lost
	}
	return response, err
}

// kept holds what a handler sends until the step is over: a slow reader must not keep others waiting.
type kept struct {
	grpc.ServerStream
	messages []interface{}
}

func (k *kept) SendMsg(message interface{}) error {
	k.messages = append(k.messages, message)
	return nil
}

func stream(service interface{}, to grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	fault := faultOf(to.Context(), info.FullMethod)
	switch fault {
	case "before":
		return lost
	case "hang":
		<-to.Context().Done()
		return lost
	}
	answer := &kept{ServerStream: to}
	steps.Lock()
	err := handle(service, answer)
	steps.Unlock()
	for _, message := range answer.messages {
		if failed := to.SendMsg(message); failed != nil {
			return failed
		}
	}
	if fault == "after" {
		return lost
	}
	return err
}

func main() {
	flag.Parse()
	random = rand.New(rand.NewSource(*seed))
	server, err := bttest.NewServer("127.0.0.1:0",
		grpc.MaxRecvMsgSize(messageBytesMax), grpc.MaxSendMsgSize(messageBytesMax),
		grpc.UnaryInterceptor(one), grpc.StreamInterceptor(stream))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(server.Addr)
	if *lose == 0 {
		select {}
	}
	io.Copy(io.Discard, os.Stdin)
	fmt.Printf("{\"requests lost\": %d, \"answers lost\": %d, \"carried out late\": %d, \"calls hung\": %d}\n",
		requests.Load(), answers.Load(), later.Load(), hung.Load())
}
