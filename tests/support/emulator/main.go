// A Bigtable server in memory, for tests: Google's bttest, as Debian packages it, on an address that it prints.
//
// A call with the metadata "perco-fault: before" loses its request, one with "after" its answer. Every call is one
// atomic step, as the service promises for one row.
package main

import (
	"context"
	"fmt"
	"log"
	"sync"

	"cloud.google.com/go/bigtable/bttest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const messageBytesMax = 256 << 20

var (
	steps sync.Mutex
	lost  = status.Error(codes.Unavailable, "lost on the way")
)

func faultOf(ctx context.Context) string {
	found, _ := metadata.FromIncomingContext(ctx)
	for _, value := range found.Get("perco-fault") {
		return value
	}
	return ""
}

func one(ctx context.Context, request interface{}, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (interface{}, error) {
	fault := faultOf(ctx)
	if fault == "before" {
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

func stream(service interface{}, to grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if faultOf(to.Context()) == "before" {
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
	if faultOf(to.Context()) == "after" {
		return lost
	}
	return err
}

func main() {
	server, err := bttest.NewServer("127.0.0.1:0",
		grpc.MaxRecvMsgSize(messageBytesMax), grpc.MaxSendMsgSize(messageBytesMax),
		grpc.UnaryInterceptor(one), grpc.StreamInterceptor(stream))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(server.Addr)
	select {}
}
