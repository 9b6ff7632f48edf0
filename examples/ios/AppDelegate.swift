import UIKit

@main
final class AppDelegate: UIResponder, UIApplicationDelegate {
    var window: UIWindow?

    func application(
        _ application: UIApplication, didFinishLaunchingWithOptions options: [UIApplication.LaunchOptionsKey: Any]?
    ) -> Bool {
        let made = UIWindow(frame: UIScreen.main.bounds)
        made.rootViewController = ViewController()
        made.makeKeyAndVisible()
        window = made
        return true
    }
}
